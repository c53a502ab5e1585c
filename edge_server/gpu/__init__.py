"""The only package that calls CUDA: devices, streams, memory, kernels and graphs.

A machine without CUDA is a normal state: everything here can be imported there, and opening a
GPU raises the reason with its remedy.
"""
