class Reply:
    pass
class LoweringWorker:
    def lower(self, module, version, keep_text=False):
        from torch_mlir import ir
        from torch_mlir.passmanager import PassManager
        from torch_mlir._mlir_libs import _stablehlo
        from dynaxla.lowering import mlir
        from dynaxla.errors import LoweringFailed
        ctx = mlir.load().context()
        with ctx, ir.Location.unknown():
            m = ir.Module.parse(module)
            try:
                PassManager.parse("builtin.module(func.func(torch-match-quantized-custom-ops), torchdynamo-export-to-torch-backend-pipeline{extra-library=})").run(m.operation)
                PassManager.parse("builtin.module(torch-backend-to-stablehlo-backend-pipeline{allow-non-finites=true})").run(m.operation)
            except Exception as e:
                raise LoweringFailed(explanation=str(e)[:2000])
            def walk(o):
                for r in o.regions:
                    for b in r.blocks:
                        for x in list(b.operations):
                            if x.operation.name=="arith.constant":
                                n=ir.Operation.create("stablehlo.constant",results=[x.operation.results[0].type],attributes={"value":x.operation.attributes["value"]},ip=ir.InsertionPoint(x))
                                x.operation.results[0].replace_all_uses_with(n.results[0]); x.operation.erase()
                            else: walk(x.operation)
            walk(m.operation)
            r=Reply(); r.artifact=_stablehlo.serialize_portable_artifact(m, version)
            return r
