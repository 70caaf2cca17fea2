"""The wall around torch: every private name of it that this package uses stands behind one of these modules, one a boundary.

A private name is one that torch may change in any release: a module or name that begins with an underscore, what is in
torch.fx.experimental, an attribute that only torch's own code reads. Each function says what it relies on. On the torch that is
installed tests/torch_api holds each to that; tests/torch_api/test_wall.py fails where such a name stands anywhere
else in the package.

    overloads     operators: their types, and what their schemas say
    custom_ops    operators that users make, and their autograd formulas
    python_kernels    the Python kernels by which torch decomposes an op before any table is asked
    decompositions    torch's decompositions, and what they are written with
    dynamo_capture    Dynamo, at the function that it is capturing
    dynamo        Dynamo: its settings, exceptions and lock, and what torch.compile returned
    aot           AOTAutograd: its call, what it knows of inputs, forward and backward
    symbols       symbolic sizes: expressions, examples, guards, ranges
    size_functions    the functions that such expressions are made of
    fakes         fake tensors, and what they share
    storages      memory: addresses, marks, versions, DLPack
    modules       what a torch.nn.Module keeps to itself
    pytree        nested arguments as flat lists
    artifacts     torch's carrier of caches
    capture_cache AOTAutograd's cache: what it keeps of a capture, and when
    dynamo_packages   Dynamo's captures on disk: what torch loses of wrapped functions, mended
    dynamo_guards     their guards
    graph_pickling    captured graphs as bytes
    gc_guard      Python's cyclic collector
    frames        variables of torch's functions that are running
    patches       the attributes of torch that are replaced, and why

Behind no wall are the names of ATen ops (`torch.ops.aten._to_copy`), which are data, and two keys of a node's `meta` that torch
documents for exported graphs: "val", the fake value, and "stack_trace".
All of it is in torch 2.13.0, with which it is run, and by its sources in 2.11.0 and 2.12.1, unless a function says else.
"""
