"""What the demo asks for where nothing is said."""

from trl_ext.demo.settings import TO, settings
from trl_ext.extension.options import ExtendOptions


def test_every_setting_is_an_option_of_extend():
    for device in TO:
        made = settings(device, {})
        ExtendOptions(model="m", data=("a",), output="o", **made)
        assert made["device"] == device and made["to"] == TO[device] == made["lengths"][-1]


def test_what_is_given_wins_and_the_longest_prompt_is_of_the_target():
    made = settings("cpu", {"rows": 3, "to": 9000})
    assert made["rows"] == 3 and made["lengths"] == (1024, 9000)
    assert settings("cpu", {"to": 9000, "lengths": (100,)})["lengths"] == (100,)
