"""Makes components of users' own functions and classes: one adapter for each way in which they may be called.

`slime.plugins.local` finds and loads the functions and names the adapter; nothing else imports this room.
"""
