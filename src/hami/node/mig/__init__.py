"""MIG on the node: instances that an administrator made (static), and instances made per pod (dynamic).

Pure: ``profiles`` (what a card offers), ``static`` (which resources), ``plan`` (what to make, keep and
destroy), ``journal`` (what this plugin has made) and ``caps`` (device nodes). I/O: ``nvml`` (the driver),
``manager`` (dynamic), ``reader`` and ``server`` (static), ``watch`` (when to look again).
"""
