"""x"""
FIGURES = {}
