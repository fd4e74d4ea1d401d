"""New plugin packages: small, complete, tested, and as their authors would write them by hand.

`templates/package` is what all kinds have in common, the other folders what each kind has of its own.
"""

from slime.scaffold.names import Names
from slime.scaffold.package import write_package

__all__ = ["Names", "write_package"]
