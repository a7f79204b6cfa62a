"""The kernels of the backend `triton`, and how they are launched. Importing it needs Triton."""
