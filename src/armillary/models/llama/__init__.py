"""The Llama 3 family."""

from armillary.models.llama.config import LLAMA_RELEASES, LLAMA_SIZES, Llama, llama3

__all__ = ["LLAMA_RELEASES", "LLAMA_SIZES", "Llama", "llama3"]
