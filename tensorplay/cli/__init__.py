"""x"""
def main(): pass
