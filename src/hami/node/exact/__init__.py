"""Allocation mode ``exact`` (device-plugin.md §17): no node lock, any number of pods at once.

Allocate answers a CDI name made of the device ids. PreStartContainer, which kubelet calls before it creates
the container, finds the one container that holds the ids and writes the CDI document of that name.
"""
