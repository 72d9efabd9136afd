"""What every room may use: registries, number checks, keyed draws, papers, versions, JSON records.

Imports nothing of the other rooms; import its modules by name.
"""
