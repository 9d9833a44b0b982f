"""Accelerator families on one pure engine: requests, vector checks, fit, annotations."""
