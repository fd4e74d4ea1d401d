"""Plugins that a test installs."""

from tests.support.distributions import install

__all__ = ["install"]
