"""The monitor: reads the containers' regions, serves metrics, runs the feedback loop, removes leftovers.

Pure parts: ``region`` (bytes to numbers), ``feedback`` (who is blocked), ``series`` (numbers to metrics),
``pods`` (what is kept of a pod). Thin shells: ``files`` (bounded, symlink-safe access), ``tracker`` (one pass
over all containers), ``garbage`` (old directories), ``hostgpu`` (NVML), ``server`` (HTTP), ``service`` (the
5 s tick).
"""
