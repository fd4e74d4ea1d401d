"""What each kind of component must hand back, as functions that raise `PluginContractError`.

The kernel calls them on everything a component returns during a run, and `slime.testing` on what it returns in an
author's tests: one rule, written once.  Messages have no subject; the caller puts the component's name in front.
"""
