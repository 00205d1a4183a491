"""The two bottlenecks of an attention head, which are measured and widened each by itself."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One of a head's two bottlenecks.

    Attributes:
        name: "patterns" or "messages".
        stacked, shared: the roles of its two sides; the second one is shared by the query heads of a group.
        width: what a number of its dims is called.
    """

    name: str
    stacked: str
    shared: str
    width: str

    @property
    def roles(self) -> tuple[str, str]:
        """The roles of both sides, the stacked one first."""
        return self.stacked, self.shared


PATTERNS = Kind("patterns", "query", "key", "qk_dims")
MESSAGES = Kind("messages", "output", "value", "v_dims")
KINDS = {kind.name: kind for kind in (PATTERNS, MESSAGES)}
