"""What forked trainer ranks of tests import, for the server that they are forked from: once, and not in each of them.

A rank that reads a tokenizer would spend three seconds on 600 modules of transformers, one with an estimator half a
second on the plugins. Each imports the module of its test, and so pytest; reads Megatron's flags, which are kept; and
counts with `numpy.unique`, which imports masked arrays.
"""

import numpy.ma  # noqa: F401
import pytest  # noqa: F401
from transformers.models.auto import tokenization_auto  # noqa: F401

import slime.engine.client
import slime.run.trainer  # noqa: F401
import slime_families.dense  # noqa: F401
from slime.config.flag_table import MEGATRON, flags_of
from slime.registry.plugin_set import survey_plugins

survey_plugins()
list(flags_of(MEGATRON))
