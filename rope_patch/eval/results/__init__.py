"""Results of measures: how they are kept, compared and drawn.

Measures, suite and report import from here.
"""
