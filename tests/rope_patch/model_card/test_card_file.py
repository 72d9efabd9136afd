"""A page that somebody wrote or edited is kept; our own is written anew."""

import logging

from rope_patch.model_card import CARD_NAME, OTHER_CARD_NAME, has_card_of_user, write_card


def test_our_own_page_is_written_anew(tmp_path):
    assert not has_card_of_user(tmp_path)
    write_card(tmp_path, "---\ntags: []\n---\n# One\n", keep=False)
    assert not has_card_of_user(tmp_path)
    assert write_card(tmp_path, "# Two\n", keep=has_card_of_user(tmp_path)).name == CARD_NAME
    assert "Two" in (tmp_path / CARD_NAME).read_text() and not (tmp_path / OTHER_CARD_NAME).exists()


def test_a_page_that_was_edited_is_kept_and_that_is_told(tmp_path, caplog):
    page = write_card(tmp_path, "# One\n", keep=False)
    edited = page.read_text().replace("One", "My model")
    page.write_text(edited)
    assert has_card_of_user(tmp_path)
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        other = write_card(tmp_path, "# Two\n", keep=True)
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert page.read_text() == edited and other.name == OTHER_CARD_NAME and "# Two" in other.read_text()
    assert "It is kept, and the card of this model is in README.rope-patch.md" in caplog.text


def test_a_page_of_another_program_is_kept(tmp_path):
    (tmp_path / CARD_NAME).write_text("# Model Card for x\n")
    assert has_card_of_user(tmp_path)
