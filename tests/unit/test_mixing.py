import numpy as np
import torch

from kvcanary_plugin.kernels.mixing import as_int64, make_keys, mix, mix_array, mix_int


def test_mix_has_the_published_values_of_the_splitmix64_finalizer():
    # splitmix64 seeded with 0 and with 1234567: its first outputs are mix of the seed plus the golden gamma
    assert mix_int(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert mix_int(1234567 + 0x9E3779B97F4A7C15) == 6457827717110365317


def test_python_numpy_and_torch_agree_on_words_of_either_sign():
    values = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]
    expected = [mix_int(value) for value in values]

    assert mix_array(np.array(values, dtype=np.uint64)).tolist() == expected
    assert mix(torch.tensor([as_int64(v) for v in values])).tolist() == [as_int64(v) for v in expected]


def test_keys_follow_from_source_and_word():
    keys = make_keys(3, 5, "cpu")

    assert keys[2, 4].item() == as_int64(mix_int(0x6B7663616E617279 + 2 * 2**32 + 4))
    assert len(set(keys.flatten().tolist())) == 15
