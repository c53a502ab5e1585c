"""The only room that touches CUDA: devices, streams, memory and what runs on them.

A machine without CUDA is a normal state: everything here can be imported there, and the first
wish for a GPU is answered with the reason and its remedy.
"""
