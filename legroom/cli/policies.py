"""`legroom policies`: who can choose."""

import inspect

from rich.table import Table

from legroom.cli.answer import Answer, verb
from legroom.cli.options import AsJson


@verb
def policies(as_json: AsJson = False) -> Answer:
    """List the policies: each chooses what to keep, recompute, move or shrink.

    Give one by name to estimate or fit, or see them all side by side on your job:

        legroom fit transformer --budget 120MiB --policy every_nth

        legroom compare transformer --budget 120MiB
    """
    found = policy_docs()
    table = Table("policy", "what it does", box=None, pad_edge=False, padding=(0, 2))
    for name, doc in found.items():
        table.add_row(name, doc)
    rows = [{"name": name, "doc": doc} for name, doc in found.items()]
    return Answer({"policies": rows}, [table])


def policy_docs() -> dict[str, str]:
    """Each policy's name, with the first line of what its function says of itself."""
    import legroom.memory.policies  # noqa: F401  (fills the registry)
    from legroom.memory.planner import POLICIES

    docs = {name: inspect.getdoc(POLICIES[name]) or "" for name in POLICIES}
    return {name: docs[name].partition("\n")[0] for name in sorted(docs)}
