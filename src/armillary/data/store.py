"""The front of token stores: build one or find it in the cache, open it, verify it."""

from armillary.data.build import build, locate
from armillary.data.token_store import TokenStore, open_store, verify

__all__ = ["TokenStore", "build", "locate", "open_store", "verify"]
