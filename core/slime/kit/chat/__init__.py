"""Conversations with the policy that are exactly the tokens the engine saw, and tools that it may call.

A multi-turn generator keeps a `Conversation`: it appends the engine's tokens unchanged, and encodes only the messages
between them. Model output is never decoded and encoded again.
"""

from slime.kit.chat.codec import Codec, end_tokens
from slime.kit.chat.conversation import Answers, Conversation
from slime.kit.chat.template import ChatTemplate
from slime.kit.chat.tool_calls import SGLangParser, TagParser, ToolCall, ToolCallParser
from slime.kit.chat.toolbox import Toolbox, ToolResult
from slime.kit.chat.tools import Tool, load_function, load_tools, tool_of

__all__ = [
    "Answers",
    "ChatTemplate",
    "Codec",
    "Conversation",
    "SGLangParser",
    "TagParser",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolResult",
    "Toolbox",
    "end_tokens",
    "load_function",
    "load_tools",
    "tool_of",
]
