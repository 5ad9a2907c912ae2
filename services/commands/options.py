"""What several commands share: their common options, and where messages go."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from common.config import Config
from common.config_file import load_config

messages = Console(stderr=True)
"""For what is not a command's result."""

ConfigOption = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.")]
StateOption = Annotated[Path, typer.Option(help="Tells several meshes on one machine apart.")]
StateDirOfConfig = Annotated[
    Path | None, typer.Option("--state-dir", help="Use the settings of the mesh that runs there.")
]
WorkloadOption = Annotated[
    str | None,
    typer.Option(help="In place of --trace, drawn lengths: lpld, lphd, hpld, hphd or mixed (TetriInfer)."),
]
LengthScaleOption = Annotated[float, typer.Option(help="Multiply a workload's lengths, for another context.")]
PromptTokensOption = Annotated[
    str | None,
    typer.Option(help="In place of --trace: N, LOW:HIGH or lognormal:MEDIAN:SIGMA:LOW:HIGH."),
]
OutputTokensOption = Annotated[str | None, typer.Option(help="Like --prompt-tokens, which it goes with.")]
BURSTINESS = "Of Poisson's gaps, a gamma's shape: 1 is Poisson, 0.25 has twice its deviation."
UrlOption = Annotated[str | None, typer.Option("--url", help="The server to talk to.")]


def config_of(file: Path | None, state_dir: Path | None) -> Config:
    """Of the file, or of the mesh that runs in a state directory. Raises ConfigError, MeshNotRunning."""
    if state_dir is None or file is not None:
        return load_config(file)
    from services.launcher.local import mesh_config

    return mesh_config(state_dir)
