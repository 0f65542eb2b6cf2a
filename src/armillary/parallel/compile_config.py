"""What a recipe says about compilation. Importing this module loads no torch."""

from __future__ import annotations

from dataclasses import dataclass

from armillary.foundation.errors import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Compile:
    """Compilation with torch.compile, one block at a time."""

    enabled: bool = False
    """Compile the blocks."""
    backend: str = "inductor"
    """Compiler: inductor, or aot_eager to look for faults without generating code."""
    mode: str = "default"
    """Inductor's mode: default, reduce-overhead, max-autotune, max-autotune-no-cudagraphs."""

    def problems(self) -> list[Problem]:
        """Values that torch.compile does not know, or that do not go together."""
        unknown = [
            Problem(
                f"compile.{name} = {value} is not known",
                allowed=", ".join(known),
                fix=f"--compile.{name} {known[0]}",
            )
            for name, value, known in (
                ("backend", self.backend, ("inductor", "aot_eager", "eager", "cudagraphs")),
                (
                    "mode",
                    self.mode,
                    ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
                ),
            )
            if value not in known
        ]
        if unknown or self.backend == "inductor" or self.mode == "default":
            return unknown
        return [
            Problem(
                f"compile.mode = {self.mode} is inductor's, and compile.backend = {self.backend}",
                allowed="default, or compile.backend = inductor",
                fix="--compile.mode default",
            )
        ]
