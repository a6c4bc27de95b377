"""The mistakes a user can make. Knows nothing of who shows them.

Whoever faces a person (the command, the server) turns a `UserError` into one line; everything else
is a fault of ours.
"""

from __future__ import annotations


class UserError(ValueError):
    """A user's mistake: one line with the offending value and what would be valid."""


class InvalidRequest(UserError):  # noqa: N818 - reads as what it is: `raise InvalidRequest(...)`
    """A request that cannot be honoured: a field, a prompt, a row without any allowed token."""


class ModelError(UserError):
    """Model files that cannot be used, or a model whose output is not a number."""


class IntegrityError(RuntimeError):
    """State that contradicts itself: a fault of ours, found by a `check_integrity`."""


class ConfigError(UserError):
    """An engine or speculation setting that is unknown or out of range."""
