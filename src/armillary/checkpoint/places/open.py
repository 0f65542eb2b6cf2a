"""From what people type to a place. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from armillary.checkpoint.places.local import LocalPlace
from armillary.checkpoint.places.place import Place
from armillary.foundation.errors import Problem, UserError, nearest
from armillary.foundation.stores import CREDENTIALS, OBJECT_STORES, is_address


def is_remote(address: str | Path) -> bool:
    """Whether an address is of an object store rather than a path."""
    return is_address(address)


def open_place(address: str | Path, retry_seconds: float = 60) -> Place:
    """The place at an address; nothing is asked of it yet.

    Args:
        address: a path, or s3://bucket/folder, gs://bucket/folder, az://container/folder.
        retry_seconds: how long one request to an object store is tried again, in seconds.

    Raises:
        UserError: an address of no known kind, or with a password in it, or whose optional
            dependency group is not installed.
    """
    if not is_remote(address):
        return LocalPlace(Path(address).expanduser())
    from armillary.checkpoint.places.remote import RemotePlace

    text = str(address).rstrip("/")
    if any(sign in text for sign in "*?[]"):  # a pattern to fsspec, which removes all that it fits
        raise UserError(Problem(f"{text} is not a folder of a bucket", "s3://bucket/folder"))
    parts = urlsplit(text)
    if "@" in parts.netloc:
        shown = f"{parts.scheme}://...@{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise UserError(
            Problem(
                f"{shown} holds a user name or a password, which would end up in logs and recipes",
                "an address without them",
                "leave it out: credentials are read from the environment, as the store's own tools"
                " read them",
            )
        )
    if parts.scheme not in OBJECT_STORES:
        close = nearest(parts.scheme, OBJECT_STORES)
        raise UserError(
            Problem(
                f"{text} is of no kind of place that is known",
                "a path, s3://bucket/folder, gs://bucket/folder or az://container/folder",
                text.replace(parts.scheme, close, 1) if close else None,
            )
        )
    if not parts.netloc or parts.fragment or ".." in parts.path.split("/"):
        raise UserError(Problem(f"{text} is not a folder of a bucket", "s3://bucket/folder"))
    return RemotePlace(text, retry_seconds=retry_seconds)


def require_reach(place: Place) -> None:
    """Asks an object store for a list of names: what keeps us out is told before work starts.

    Raises:
        UserError: it does not answer, or does not let us in.
    """
    if place.local is not None:
        return
    try:
        place.names()
    except OSError as error:
        why = error.strerror or str(error)
        found = CREDENTIALS[place.address.partition("://")[0]]
        raise UserError(
            Problem(
                f"{place.address} cannot be read: {why}",
                "a store that answers, and credentials that it takes",
                f"credentials from the environment: {found}",
            )
            if isinstance(error, PermissionError)
            else Problem(
                f"{place.address} cannot be read: {why}",
                "a store that answers",
                "look at its address and at the network",
            )
        ) from None


def open_reachable(address: str | Path) -> Place:
    """The place at an address, which has answered.

    Raises:
        UserError: as `open_place` and `require_reach`.
    """
    place = open_place(address)
    require_reach(place)
    return place
