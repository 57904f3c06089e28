"""--profile: a trace that Perfetto opens, and its table, without a changed bit."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from lockstep.reports.trace import Trace


def test_the_master_traces_some_updates(train):
    train("plain", ranks=2, steps=6)
    train("traced", ranks=2, steps=6, profile="3:2")
    assert [path.name for path in (train.runs / "traced").glob("trace*")] == ["trace-00000003.json.gz"]
    with gzip.open(train.runs / "traced" / "trace-00000003.json.gz") as file:
        events = json.load(file)["traceEvents"]
    spans = {name: [event for event in events if event["ph"] == "X" and name in event["name"]] for name in ("adamw", "update ")}
    assert {event["name"] for event in spans["update "]} == {"update 3", "update 4"}
    assert len(spans["adamw"]) >= 2
    for step in spans["adamw"]:  # the last thing that an update does
        assert sum(0 < step["ts"] - update["ts"] < update["dur"] for update in spans["update "]) == 1
    log = train.log("traced")
    assert "update " not in log.split("ui.perfetto.dev")[1].split("\nstep")[0]
    assert "trace-00000003.json.gz: 2 updates in " in log and "%  matmuls: " in log and "%  attention: " in log
    assert train.files("traced") == train.files("plain") and train.metrics("traced") == train.metrics("plain")


def test_a_run_that_ends_sooner_has_the_updates_until_then(train):
    train("run", steps=3, profile="3:9")
    assert "trace-00000003.json.gz: 1 update in " in train.log("run")


def test_what_is_not_a_step_and_a_count_is_refused(train):
    for wrong in ("3", "3:0", "0:3", "a:b"):
        assert f"--profile={wrong} must be STEP:COUNT, such as 100:3" in train("run", status=2, profile=wrong).stderr


def table(device, events):
    """The table of a trace with these events."""
    trace = Trace(SimpleNamespace(is_master=True), "1:1", torch.device(device))
    trace.profiler = SimpleNamespace(key_averages=lambda: events)
    return [line.strip() for line in trace.table()]


def event(key, kind, host, device, note=False):
    more = dict(self_cpu_time_total=host, self_device_time_total=device, is_user_annotation=note)
    return SimpleNamespace(key=key, device_type=kind, **more)


def test_graphs_of_the_compiler_are_one_operation():
    keys = {"## Call CompiledFxGraph fepc ##": 30, "## Call CompiledFxGraph fwnf ##": 40, "TorchDynamo Cache Lookup": 10}
    keys |= {"record_param_comms": 20}
    lines = table("cpu", [event(key, DeviceType.CPU, time, 0) for key, time in keys.items()])
    assert lines == [
        "80.0%  compiled code: CompiledFxGraph 70.0%, TorchDynamo Cache Lookup 10.0%",
        "20.0%  communication: record_param_comms 20.0%",
    ]


def test_on_a_gpu_the_time_of_the_kernels_counts():
    events = [
        event("aten::mm", DeviceType.CPU, 500, 60),  # its kernel follows
        event("ampere_sgemm_128x64_tn", DeviceType.CUDA, 0, 60),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", DeviceType.CUDA, 0, 30),
        event("void at::native::vectorized_elementwise_kernel<4, FillFunctor<float>>", DeviceType.CUDA, 0, 10),
        event("Torch-Compiled Region", DeviceType.CUDA, 0, 100, note=True),
    ]
    assert [line.split(":")[0].split() for line in table("cuda:0", events)] == [
        ["60.0%", "matmuls"],
        ["30.0%", "communication"],
        ["10.0%", "copies"],
    ]


@pytest.mark.parametrize(
    "kind, kernels",
    {
        "compiled code": [
            "triton_poi_fused_addmm_gelu_2",
            "triton_per_fused_add_addmm_native_layer_norm_5",
            "triton_red_fused__scaled_dot_product_flash_attention__to_copy_add_9",
            "triton_poi_fused_all_gather_into_tensor_1",
        ],
        "communication": ["ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gloo:all_reduce"],
        "attention": [
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<64>>",
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
            "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(cudnn::fusion::Dot_do_o_params)",
            "triton_tem_fused_flex_attention_3",
        ],
        "matmuls": [
            "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
            "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>",
            "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32_stage4",
            "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8",
            "triton_tem_fused_mm_1",
        ],
        "norms": ["void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float, 64u>"],
        "optimizer": ["void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"],
    }.items(),
)
def test_kernels_of_a_gpu_count_as_what_they_compute(kind, kernels):
    for name in kernels:
        assert table("cuda:0", [event(name, DeviceType.CUDA, 0, 60)])[0].split(": ")[0] == f"100.0%  {kind}", name
