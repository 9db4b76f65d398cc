"""Renderers: a report in, a string out. Nothing here looks at a tensor."""
