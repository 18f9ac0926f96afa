"""A configuration as the settings of another server.

A file for each server says what it can be told; :mod:`specdec_core.export.nearest` finds, by
replay, what comes nearest to what it cannot be told.
"""
