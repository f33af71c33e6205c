"""The nouns: frozen values and pure functions. Imports nothing else of Plait, and never torch."""
