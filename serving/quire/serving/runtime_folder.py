"""The folder of the services' sockets on this machine, for services and clients without an address.

Three folders are possible, in this order:

    $XDG_RUNTIME_DIR/quire   a login's own folder, if the variable names a folder of this user
    /run/quire               the folder of the systemd units, and of root in a container
    TMP/quire-UID            private to this user, in the system's folder for temporary files

A service uses the first one that belongs to this user or that this user can make. A client takes the first one with a
cachemgr's socket; without a socket, the folder in which this user's services would serve. Only this user or root can
make the first two. Any user could make the third, so a client ignores it unless it belongs to this user, and takes
/run/quire instead.
"""

import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

SYSTEM_FOLDER = Path("/run/quire")
MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""The longest path of a unix socket on this system: sun_path less its final zero byte."""
MAX_FOLDER_BYTES = 80  # leaves room for a socket's name within the 103 bytes that every system allows


class RuntimeFolderError(OSError):
    """The folder can't be used; the message names the folder and the reason."""


def serving_folder() -> Path:
    """Return the folder where this user's services serve; it may not exist yet."""
    *others, last = _candidates()
    return next((folder for folder in others if _is_usable(folder)), last)


def make_serving_folder() -> Path:
    """Return serving_folder(), made if it is missing, mode 0700. Raises RuntimeFolderError."""
    folder = serving_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RuntimeFolderError(f"can't make the runtime folder {folder}: {error.strerror}") from error
    if not _is_own(folder):
        raise RuntimeFolderError(f"the runtime folder {folder} is no folder of this user, or others can write in it")
    return folder


def default_listen(service: str) -> str:
    """Return the address at which a service, "cachemgr" or "worker", listens by default."""
    return f"unix:{serving_folder() / f'{service}.sock'}"


def default_cachemgr() -> str:
    """Return the address at which a client looks for cachemgr by default."""
    *others, last = _candidates()
    trusted = [*others, last] if _is_own(last) else others
    served = (folder for folder in trusted if _is_socket(folder / "cachemgr.sock"))
    expected = serving_folder()
    folder = next(served, expected if expected in trusted else SYSTEM_FOLDER)
    return f"unix:{folder}/cachemgr.sock"


def given_cachemgr() -> str:
    """Return the address of cachemgr for a client that was given none: QUIRE_CACHEMGR, or default_cachemgr()."""
    return os.environ.get("QUIRE_CACHEMGR") or default_cachemgr()


def short_temporary_folder() -> str:
    """Return the folder for temporary files, or /tmp if a socket's path in it could be too long."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) + len("/quire-1234567890") <= MAX_FOLDER_BYTES else "/tmp"


def _candidates() -> Iterator[Path]:
    login = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if login.is_absolute() and len(os.fsencode(login)) + len("/quire") <= MAX_FOLDER_BYTES and _is_own(login):
        yield login / "quire"
    yield SYSTEM_FOLDER
    yield Path(short_temporary_folder(), f"quire-{os.getuid()}")


def _is_usable(folder: Path) -> bool:
    """Say if the folder belongs to this user, or is missing and can be made."""
    return _is_own(folder) or (not folder.exists() and os.access(folder.parent, os.W_OK | os.X_OK))


def _is_own(folder: Path) -> bool:
    """True if it is a folder, not a link, of this user, in which no other user can write."""
    try:
        found = folder.stat(follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode)
    except OSError:
        return False
