"""KServe v2 over HTTP, as Triton serves it: `rest_routes` of `routes`."""
