"""slime: reinforcement-learning post-training that joins Megatron-core and SGLang under Ray.

The kernel of the framework.  Importing it loads nothing heavy.
"""

__version__ = "0.2.0"
