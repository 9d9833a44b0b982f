"""PCI devices in sysfs."""

from __future__ import annotations


def sysfs_folder(bus_id: str, sysfs: str = "/sys") -> str:
    """Folder of the device that NVML names ``bus_id``; one leading ``0000`` of its eight-digit domain is
    removed.
    """
    name = bus_id.lower()
    if name.startswith("0000") and name.find(":") == 8:
        name = name[4:]
    return f"{sysfs}/bus/pci/devices/{name}"
