"""Conversations with the policy that stay token for token what the engine saw, and tools that it may call.

A generator of several turns keeps a `Conversation`: answers go in as the engine gave them, and of messages between
them only the new tokens are made.  Model output is never decoded and encoded again.
"""

from slime.chat.answers import Answers
from slime.chat.conversation import Conversation
from slime.chat.functions import load_function
from slime.chat.sglang_parser import SGLangParser
from slime.chat.template import ChatTemplate
from slime.chat.tool_calls import TagParser, ToolCall, ToolCallParser
from slime.chat.toolbox import Toolbox, ToolResult
from slime.chat.tools import Tool, load_tools, tool_of

__all__ = [
    "Answers",
    "ChatTemplate",
    "Conversation",
    "SGLangParser",
    "TagParser",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolResult",
    "Toolbox",
    "load_function",
    "load_tools",
    "tool_of",
]
