"""The only package that calls CUDA: devices, streams, memory, kernels and graphs.

A machine without CUDA is a normal state: every module here can be imported on it, and opening a GPU
raises the reason with its remedy.
"""
