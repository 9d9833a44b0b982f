"""CDI documents of MIG instances that are made for containers: each goes with its instance (§8.4)."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Final

from hami.node.cdi import kinds
from hami.node.cdi.directory import CdiDirectory, remove_files
from hami.node.cdi.driver import DriverRoots, card_edits, driver_edits
from hami.node.cdi.edits import CdiError, Edits, build_spec, merged
from hami.node.errors import UnsafePathError
from hami.node.paths import HostPaths

_START: Final = f"{kinds.file_of(kinds.GPU).removesuffix('.json')}-MIG-"
_CAPABILITIES: Final = "/dev/nvidia-caps/"

log = logging.getLogger(__name__)


class InstanceDocuments:
    """Documents beside those of the cards: ``k8s.device-plugin.nvidia.com-gpu-<UUID>.json``."""

    def __init__(self, paths: HostPaths, roots: DriverRoots) -> None:
        self._directory = CdiDirectory(paths)
        self._roots = roots

    def write(self, uuid: str, paths: Sequence[str], bus_id: str) -> Edits:
        """Put the document of a MIG device in place; what it adds to a container, the driver included.

        Raises :class:`CdiError`, also where the driver names no capability of the device: a container could
        not use it.
        """
        if not any(path.startswith(_CAPABILITIES) for path in paths):
            raise CdiError(f"the driver names no device node of {uuid} below {_CAPABILITIES}")
        common, own = driver_edits(self._roots), card_edits(self._roots, paths, bus_id)
        try:
            self._directory.write(_file(uuid), build_spec(kinds.GPU, {uuid: own}, common))
        except UnsafePathError as error:
            raise CdiError(f"cannot write the CDI document of {uuid}: {error}") from error
        except OSError as error:
            words = error.strerror or error
            raise CdiError(
                f"cannot write the CDI document of {uuid} into {self._directory.path}: {words}"
            ) from error
        return merged((common, own))

    def retain(self, uuids: Collection[str]) -> None:
        """Remove the documents of other instances; what cannot be removed is only told."""
        kept = {_file(uuid) for uuid in uuids}
        try:
            with self._directory.open() as directory:
                remove_files(
                    directory,
                    lambda file: float("inf") if file.startswith(_START) and file not in kept else None,
                )
        except (OSError, UnsafePathError) as error:
            log.warning("mig.documents_stay", extra={"cause": str(error)})


def _file(uuid: str) -> str:
    return f"{_START}{uuid.removeprefix('MIG-').replace('/', '_')}.json"
