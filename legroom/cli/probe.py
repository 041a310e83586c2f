"""`legroom probe`: measure this machine."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from legroom.cli.answer import Answer, progress, verb
from legroom.cli.options import AsJson, DeviceName
from legroom.views.table import machine_table


@verb
def probe(
    device: DeviceName = None,
    directory: Annotated[
        str | None, typer.Option("--directory", help="Where the disk is measured.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few seconds, with rougher numbers.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Keep the numbers in a file.", dir_okay=False)
    ] = None,
    as_json: AsJson = False,
) -> Answer:
    """Measure this machine: memory, copies, disk and compute.

    Plans for this machine are made from these numbers. Save them to plan for it elsewhere:

        legroom probe --save desk.json

        legroom estimate transformer --machine desk.json
    """
    from legroom.machine.probe import probe as measure

    done = 0.0
    with progress("measuring", 1.0) as advance:

        def tell(stage: str, share: float) -> None:
            nonlocal done
            advance(stage, share - done)
            done = share

        machine = measure(device, directory=directory, quick=quick, progress=tell)
    if save is not None:
        machine.save(save)
    notes = [f"saved to {save}"] if save is not None else []
    return Answer(msgspec.Raw(machine.to_json().encode()), [machine_table(machine), *notes])
