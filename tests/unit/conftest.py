import pytest


@pytest.fixture(params=[1, 16], ids=lambda size: f"page{size}")
def page_size(request):
    return request.param
