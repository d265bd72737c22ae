"Build the package from settings.ini (metadata) and fastai_xla/__init__.py (version)"
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

here = Path(__file__).resolve().parent
parser = ConfigParser(delimiters=['='])
parser.read(here/'settings.ini', encoding='utf-8')
ini = parser['DEFAULT']
stages = {'3': 'Alpha', '4': 'Beta', '5': 'Production/Stable'}

lowest,end = (int(ini[k].split('.')[1]) for k in ('min_python', 'max_python'))
pythons = [f'Programming Language :: Python :: 3.{n}' for n in range(lowest, end)]

def listed(key): return [line for line in ini.get(key, '').split('\n') if line.strip()]
def text(name): return (here/name).read_text(encoding='utf-8')

setup(
    name=ini['lib_name'],
    version=re.search(r'__version__ = ["\'](.+?)["\']', text(f"{ini['lib_path']}/__init__.py"))[1],
    author=ini['author'],
    author_email=ini['author_email'],
    license_expression=ini['license'],
    keywords=ini['keywords'].split(),
    classifiers=[f"Development Status :: {ini['status']} - {stages[ini['status']]}", 'Intended Audience :: Developers',
                 'Intended Audience :: Science/Research', 'Topic :: Scientific/Engineering :: Artificial Intelligence',
                 'Operating System :: POSIX :: Linux', 'Typing :: Typed', 'Programming Language :: Python :: 3 :: Only', *pythons],
    python_requires=f">={ini['min_python']},<{ini['max_python']}",
    install_requires=listed('requirements'),
    extras_require={key.removesuffix('_requirements'): listed(key) for key in ini if key.endswith('_requirements')},
    packages=find_packages(include=[ini['lib_path'], f"{ini['lib_path']}.*"]),
    package_data={ini['lib_path']: ['py.typed']},
    long_description=text('README.md'),
    long_description_content_type='text/markdown',
    entry_points={'console_scripts': listed('console_scripts'), 'nbdev': [f"{ini['lib_path']}={ini['lib_path']}._modidx:d"]})
