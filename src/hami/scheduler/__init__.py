"""Scheduling: one cluster state, the decisions that follow from it, and the HTTP edge around it."""
