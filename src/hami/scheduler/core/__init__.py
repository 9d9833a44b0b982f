"""The pure core: ClusterState and all that decides a placement. No I/O, no clock, no asyncio."""
