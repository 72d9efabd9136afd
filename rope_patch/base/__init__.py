"""Shared by all rooms: registries, validators, keyed draws, papers, versions, JSON records.

Imports nothing of the other rooms; import its modules by name.
"""
