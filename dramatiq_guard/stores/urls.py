"""URLs as they may be shown: without their passwords."""

from __future__ import annotations

import re

__all__ = ["masked"]

#: Up to the last @: a password that was not quoted may hold anything, and too much masked is better than too little.
_USERINFO = re.compile(r"(?<=://)([^:@/?#]*)(:.*)?@")
_QUERY = re.compile(r"((?:^|[?&\s])(?:password|passwd|sslpassword)=)[^&\s]*", re.IGNORECASE)


def masked(url: str) -> str:
    """A URL or connection string with ``***`` for its password, fit for logs and errors.

    Parameters:
      url(str): The URL.

    Returns:
      str: The same without the password.
    """
    return _QUERY.sub(r"\1***", _USERINFO.sub(lambda found: f"{found[1]}{':***' if found[2] else ''}@", url, count=1))
