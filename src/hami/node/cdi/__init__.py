"""Container Device Interface: documents that say what a runtime adds to a container for a device."""
