"""Which pods were given which MIG devices: proof that no pod can write (device-plugin.md §11.3).

Kubelet's device checkpoint keeps what plugins answered, this one or HAMi's. In mode ``exact`` an answer only
names a CDI document, which then tells.
"""

from __future__ import annotations

import logging
import posixpath
from collections.abc import Collection, Mapping
from typing import Final, Protocol

from hami.node.errors import UnsafePathError
from hami.node.exact.cdi import device_name, document_file
from hami.node.exact.errors import KubeletStateError
from hami.node.exact.kubelet_state import FILE_NAME, MAX_BYTES, Answered, decode_answers
from hami.node.files import read_regular
from hami.node.paths import CDI_DIRECTORY, HostPaths

_MAX_DOCUMENT: Final = 1 << 20

log = logging.getLogger(__name__)


class Given(Protocol):
    """Who knows what pods were given; see :class:`GivenByKubelet`."""

    def owners(self, uuids: Collection[str], /) -> Mapping[str, Collection[str]]:
        """UIDs of pods by MIG UUID."""
        ...


class GivenByKubelet:
    """Reads kubelet's checkpoint in its plugin folder, that of ``kubelet_socket``, and the CDI directory."""

    def __init__(self, kubelet_socket: str, paths: HostPaths) -> None:
        self._state_file = posixpath.join(posixpath.dirname(kubelet_socket), FILE_NAME)
        self._documents = paths.host(CDI_DIRECTORY)

    def owners(self, uuids: Collection[str]) -> dict[str, frozenset[str]]:
        """UIDs of the pods that were given one of these MIG devices. Blocks; what cannot be read, which is
        told, proves nothing.
        """
        try:
            answers = decode_answers(read_regular(self._state_file, MAX_BYTES))
        except (OSError, UnsafePathError, KubeletStateError) as error:
            log.warning("mig.nothing_proven", extra={"file": self._state_file, "cause": str(error)})
            return {}
        said = [(answered.pod_uid, answered.answer + self._document(answered)) for answered in answers]
        return {uuid: frozenset(pod for pod, text in said if uuid.encode() in text) for uuid in uuids if uuid}

    def _document(self, answered: Answered) -> bytes:
        path = posixpath.join(self._documents, document_file(device_name(answered.device_ids)))
        try:
            return read_regular(path, _MAX_DOCUMENT)
        except (OSError, UnsafePathError):
            return b""
