"""Where ``crater simulate`` has its nodes from: files, a lab's inventory, or the store."""

from __future__ import annotations

from pathlib import Path

from crater_slurm.errors import LabError, UsageError
from crater_slurm.files import exists
from crater_slurm.lab import inventory
from crater_slurm.model.profile import NodeProfile
from crater_slurm.simulate.inventory import of_profiles
from crater_slurm.simulate.trace import Nodes, openb_nodes
from crater_slurm.store.documents import load_documents
from crater_slurm.store.importers import read_file


def read(text: str) -> Nodes:
    """Nodes of a CSV file, a YAML file of profiles or of a lab, or a lab inventory by its name."""
    file = Path(text)
    if file.suffix == ".csv":
        return openb_nodes(file)
    try:
        if not file.suffix and not exists(file):
            return of_profiles(inventory.load(text).profiles())
        return of_profiles(_profiles(file))
    except LabError as error:
        raise UsageError(str(error)) from error


def _profiles(file: Path) -> list[NodeProfile]:
    """Profiles as 'crater nodes export' prints them, or of a lab's inventory."""
    documents = load_documents(file)
    if len(documents) == 1 and isinstance(documents[0], dict):
        listed = documents[0].get("nodes")
        if isinstance(listed, list) and all(
            isinstance(item, dict) and set(item) == {"name", "profile"} for item in listed
        ):
            return inventory.parse(documents[0], str(file)).profiles()
    found = list(read_file(file).profiles)
    if not found:
        raise UsageError(f"{file} has no node profiles; 'crater nodes export' writes such a file")
    return found


def stored() -> Nodes:
    """The nodes whose profiles the store has."""
    from crater_slurm.cli.db import store_url
    from crater_slurm.store.repository import Store

    with Store.open(store_url()) as store:
        profiles = store.profiles()
    if not profiles:
        raise UsageError("no node has a profile yet, so say --nodes INVENTORY")
    return of_profiles(profiles)
