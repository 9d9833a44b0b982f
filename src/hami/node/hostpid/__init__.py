"""Host PID broker: tells a process in a container its PID on the host, by the kernel's word alone.

``codec`` is the protocol, ``endpoint`` the files (directory, lock, socket), ``serving`` the loop, ``broker``
these together; ``python -m hami.node.hostpid`` runs them in a process of their own. In the device plugin,
``child`` starts and watches that process, ``counters`` is the memory that both share, ``metrics`` shows it.
"""
