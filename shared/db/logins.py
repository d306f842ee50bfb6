"""Logging in to PostgreSQL with tokens of IAM, which are good for a quarter of an hour.

libpq reads the password of each new connection from a file (``PGPASSFILE``), so whoever connects need not know of tokens:
this keeps the file fresh. Sessions that are open stay open.
"""

import logging
import os
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from sandfleet.shared.aws_requests import TOKEN_LIFE_S, login_token
from sandfleet.shared.settings import Settings

RENEW_S = TOKEN_LIFE_S / 2
_TRY_AGAIN_S = 5.0

_log = logging.getLogger(__name__)
_file: Path | None = None
_written_at = 0.0
_keeper: threading.Thread | None = None
_lock = threading.Lock()


def keep_fresh(settings: Settings) -> None:
    """Write the file, and write it anew for as long as the process lives. Does nothing without ``database_iam``."""
    global _keeper
    if not settings.database_iam or _keeper is not None:
        return
    refresh(settings)
    _keeper = threading.Thread(target=_keep, args=(settings,), name="database logins", daemon=True)
    _keeper.start()


def refresh(settings: Settings) -> None:
    """Write the file unless the token in it is young: for Lambdas, whose threads stand still between calls."""
    global _file, _written_at
    if not settings.database_iam:
        return
    with _lock:
        if _file is not None and time.monotonic() - _written_at < RENEW_S:
            return
        line = _line(settings)
        if _file is None:
            _file = Path(tempfile.mkdtemp(prefix="sandfleet-login-")) / "pgpass"
            os.environ["PGPASSFILE"] = str(_file)
        new = _file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_text(line)
        new.rename(_file)
        _written_at = time.monotonic()


def _line(settings: Settings) -> str:
    """One line of a password file; colons and backslashes are escaped."""
    at = urlsplit(settings.database_url)
    port = at.port or 5432
    token = login_token(at.hostname or "", port, at.username or "", settings.aws_region)
    escaped = token.replace("\\", "\\\\").replace(":", "\\:")
    return f"*:*:*:{at.username}:{escaped}\n"


def _keep(settings: Settings) -> None:
    pause_s = RENEW_S
    while True:
        time.sleep(pause_s)
        try:
            refresh(settings)
            pause_s = RENEW_S
        except Exception as error:  # there is time for many tries: tokens live twice as long as they are used
            _log.warning("a login token could not be renewed", extra={"error": type(error).__name__})
            pause_s = _TRY_AGAIN_S
