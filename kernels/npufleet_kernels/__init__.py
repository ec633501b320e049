"""Operations of the decoder, one module each, behind one dispatch.

Shapes: T tokens of a step, H query heads, K key/value heads, D head size, L tokens of one sequence.
"""
