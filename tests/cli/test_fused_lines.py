"""What the closing report says of fused modules."""

from sfi_cli.commands.generate.views import fused_lines


def test_the_closing_report_names_the_classes_that_ran_fused_and_the_others():
    lines = fused_lines({"Qwen3RMSNorm": 113, "Qwen3MLP": 28}, {"Gemma3RMSNorm": 4})
    assert lines == ["fused        Qwen3RMSNorm x 113, Qwen3MLP x 28", "left alone   Gemma3RMSNorm x 4"]
    assert fused_lines({}, {}) == []
