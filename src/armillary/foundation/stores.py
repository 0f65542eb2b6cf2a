"""Object stores and hubs behind addresses such as s3://bucket/key, through fsspec. No torch."""

from __future__ import annotations

from typing import Any

from armillary.foundation.errors import missing_extra

OBJECT_STORES = ("s3", "gs", "az")
"""Kinds of object stores: what can be written to as well."""

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE (of `aws configure`), or the"
    " role of this machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, `gcloud auth application-default login`, or the account"
    " of this machine",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or `az login`",
    "hf": "HF_TOKEN, or `hf auth login`",
}
"""Where each kind's own library finds them."""

_EXTRAS = {"hf": "hub"}
"""Optional dependency groups that are not called as their kind is."""


def is_address(text: object) -> bool:
    """Whether it names something of a store rather than a path."""
    return "://" in str(text)


def connect(kind: str, request_seconds: float = 60) -> Any:
    """A store's fsspec file system; credentials are what its library finds in the environment.

    Args:
        kind: what its addresses begin with.
        request_seconds: how long a request may be silent, in seconds; for S3.

    Raises:
        UserError: the optional dependency group for this kind is not installed.
    """
    import fsspec

    # What others write must show, so nothing that was listed is remembered.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if kind == "s3":
        options["config_kwargs"] = {
            "connect_timeout": min(10, request_seconds),
            "read_timeout": request_seconds,
            "retries": {"mode": "standard", "total_max_attempts": 3},
        }
    try:
        store = fsspec.filesystem(kind, **options)
    except ImportError:
        raise missing_extra(_EXTRAS.get(kind, kind), f"{kind}://") from None
    if kind == "s3":
        store.retries = 1  # botocore tries again, and so does `insist`
    return store
